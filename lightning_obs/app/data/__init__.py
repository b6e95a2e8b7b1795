"""Data to calibrate, to train and to measure on: blocks of text, single texts, images."""
