"""A model read one token at a time: the cached forward, trees on the device, sampling, turns, files of samples."""
