"""SexpGPU: a Lisp in which one file is a whole training experiment, and its compiler."""

__version__ = "0.1.0"
