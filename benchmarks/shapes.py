"""The shapes of LLaVA-1.5-7B."""

VISION = dict(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=24,
    num_attention_heads=16,
    image_size=336,
    patch_size=14,
)
TEXT = dict(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, vocab_size=32064)
IMAGE_TOKEN, VISUAL_TOKENS = 32000, 576
