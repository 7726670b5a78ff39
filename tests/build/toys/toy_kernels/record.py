"""A record of one field."""

CHUNK = 16
HEAD_DIM = 128
RECORD_BYTES = 4096
FIELDS = (("k_decayed", 0, 4096, "bf16", (CHUNK, HEAD_DIM)),)
