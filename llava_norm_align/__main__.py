"""python -m llava_norm_align: the command line."""

from llava_norm_align.cli import main

main()
