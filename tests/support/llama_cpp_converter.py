"""Let llama.cpp's converter write tiny models as GGUF files in float16, with a vocabulary that it need not know.

    PYTHONPATH=LLAMA_CPP/gguf-py:LLAMA_CPP/packages:LLAMA_CPP python tests/support/llama_cpp_converter.py FOLDER...

Each folder of a model becomes the file of its name with ``.gguf`` behind it.
"""

import json
import sys
from pathlib import Path


def main(folders):
    import conversion
    import gguf

    for folder in map(Path, folders):
        config = json.loads((folder / "config.json").read_text())
        kind = conversion.get_model_class(config["architectures"][0])
        model = kind(folder, gguf.LlamaFileType.MOSTLY_F16, folder.with_name(f"{folder.name}.gguf"), eager=True)
        model.set_vocab = lambda: None
        model.write()


if __name__ == "__main__":
    main(sys.argv[1:])
