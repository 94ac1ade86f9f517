"""A pod's step, planned on a laptop: compiled by libtpu for chips that are not there, measured in what it must cost."""
