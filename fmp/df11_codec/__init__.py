"""DF11 on arrays: codes, streams and how they lie in memory, for the host's decoders and for the kernels."""
