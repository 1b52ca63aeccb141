"""`python -m sexpgpu` is the command `sexpgpu`."""

from sexpgpu.cli.entry import main

if __name__ == "__main__":
    main()
