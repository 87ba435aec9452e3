"""``python -m onnxplug``."""

from onnxplug.cli.app import main

if __name__ == "__main__":
    main()
