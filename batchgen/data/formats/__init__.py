"""The formats of input files: one module each, and a table of them in `batchgen.data.formats.registry`."""
