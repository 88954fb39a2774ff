"""Remote code that tests load with trust_remote_code: the configuration of a model that transformers does not know."""

from transformers import AutoConfig, PretrainedConfig


class RemoteVlmConfig(PretrainedConfig):
    """A text model, an image token, and whether the model itself puts all visual tokens in the place of one token."""

    model_type = "remote_vlm"

    def __init__(self, text_config=None, image_token_id=16, vision_size=16, expands=False, **kwargs):
        text = dict(text_config or {"model_type": "llama"})
        self.text_config = AutoConfig.for_model(**text)
        self.image_token_id = image_token_id
        self.vision_size = vision_size
        self.expands = expands
        super().__init__(**kwargs)
