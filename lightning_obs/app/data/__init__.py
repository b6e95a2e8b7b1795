"""Text to calibrate, to train and to measure on: files and chats are read, and cut into blocks of tokens."""
