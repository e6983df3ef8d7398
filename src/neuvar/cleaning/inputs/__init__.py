"""Examples with labels, whatever they come as: arrays, data sets, folders of images."""

from neuvar.cleaning.inputs.examples import Examples, read_examples, read_given

__all__ = ["Examples", "read_examples", "read_given"]
