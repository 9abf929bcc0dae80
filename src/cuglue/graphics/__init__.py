"""Graphics memory for CUDA: OpenGL contexts and objects, external memory, and the handles that map them.

This package's modules import PyOpenGL and CUDA inside functions only; importing them costs nothing but Python.
"""
