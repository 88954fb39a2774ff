"""Starts the page: python app.py [--base MODEL] [--aligned MODEL]; see docs/space.md."""

try:
    import spaces  # noqa: F401  # ZeroGPU's, which wants to be imported before torch
except ImportError:
    pass

from llava_norm_align.space.start import main

if __name__ == "__main__":
    main()
