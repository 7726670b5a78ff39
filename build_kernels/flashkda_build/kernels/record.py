"""The workspace record of one (tile, head): all that the two kernels share. DESIGN.md, section 2, has the order."""

CHUNK = 16
HEAD_DIM = 128
K_BLOCKS = HEAD_DIM // 16

K_DECAYED, Q_DECAYED, K_RESTORED = 0, 4096, 8192
G_TOTAL, INV, MQK, BETA = 12288, 12800, 13184, 13568
RECORD_BYTES = 13600
TRIANGLE_PAIR = 256  # in INV and Mqk: bytes of the two blocks that come first, interleaved; the third follows

#: (name, offset, bytes, dtype, shape)
FIELDS = (
    ("k_decayed", K_DECAYED, 4096, "bf16", (CHUNK, HEAD_DIM)),
    ("q_decayed", Q_DECAYED, 4096, "bf16", (CHUNK, HEAD_DIM)),
    ("k_restored", K_RESTORED, 4096, "bf16", (CHUNK, HEAD_DIM)),
    ("g_total", G_TOTAL, 512, "fp32", (HEAD_DIM,)),
    # lower triangular: their 8x8 blocks (0, 0), (1, 0), (1, 1)
    ("inv", INV, 384, "bf16", (3, 8, 8)),
    ("mqk", MQK, 384, "bf16", (3, 8, 8)),
    ("beta_sigmoid", BETA, 32, "bf16", (CHUNK,)),
)
