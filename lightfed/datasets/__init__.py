"""The catalogue of data sets, each read into compact tensors once."""
