"""The workspace record of one (tile, head): all that the two kernels share. DESIGN.md, section 2, has the order."""

CHUNK = 16
HEAD_DIM = 128
K_BLOCKS = HEAD_DIM // 16

K_DECAYED, Q_DECAYED, K_RESTORED = 0, 4096, 8192
G_TOTAL, INV, MQK, BETA = 12288, 12800, 13312, 13824
RECORD_BYTES = 13856

#: (name, offset, bytes, dtype, shape)
FIELDS = (
    ("k_decayed", K_DECAYED, 4096, "bf16", (CHUNK, HEAD_DIM)),
    ("q_decayed", Q_DECAYED, 4096, "bf16", (CHUNK, HEAD_DIM)),
    ("k_restored", K_RESTORED, 4096, "bf16", (CHUNK, HEAD_DIM)),
    ("g_total", G_TOTAL, 512, "fp32", (HEAD_DIM,)),
    ("inv", INV, 512, "bf16", (CHUNK, CHUNK)),
    ("mqk", MQK, 512, "bf16", (CHUNK, CHUNK)),
    ("beta_sigmoid", BETA, 32, "bf16", (CHUNK,)),
)
