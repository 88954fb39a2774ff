"""Remote code that tests load with trust_remote_code: a vision-language model with names that nobody else uses."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from .configuration_remote_vlm import RemoteVlmConfig


class RemoteVlm(PreTrainedModel, GenerationMixin):
    """Patches of 14 px through one convolution, `bridge`, and a language model."""

    config_class = RemoteVlmConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        width = config.text_config.hidden_size
        self.eyes = nn.Conv2d(3, config.vision_size, kernel_size=14, stride=14)
        self.blocks = nn.ModuleList([nn.Linear(config.vision_size, config.vision_size)])  # before the language model
        self.bridge = nn.Sequential(nn.Linear(config.vision_size, width), nn.GELU(), nn.Linear(width, width))
        self.brain = AutoModelForCausalLM.from_config(config.text_config)
        self.post_init()

    def get_input_embeddings(self):
        return self.brain.get_input_embeddings()

    def get_output_embeddings(self):
        return self.brain.get_output_embeddings()

    def forward(self, input_ids, attention_mask=None, pixel_values=None, **kwargs):
        if pixel_values is None:
            return self.brain(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        seen = self.eyes(pixel_values).flatten(2).transpose(1, 2)  # [images, patches, vision_size]
        for block in self.blocks:
            seen = seen + block(seen)
        visual = self.bridge(seen).flatten(0, 1)
        embed = self.get_input_embeddings()
        places = input_ids == self.config.image_token_id
        if not self.config.expands:
            embedded = embed(input_ids).masked_scatter(places[..., None], visual)
        else:  # as the original LLaVA: one id, which no table has, stands for all visual tokens of a batch of one
            place = int(places[0].nonzero())
            before, after = input_ids[:, :place], input_ids[:, place + 1 :]
            embedded = torch.cat([embed(before), visual[None], embed(after)], dim=1)
            if attention_mask is not None:
                attended = attention_mask[:, place : place + 1].expand(1, len(visual))
                parts = [attention_mask[:, :place], attended, attention_mask[:, place + 1 :]]
                attention_mask = torch.cat(parts, dim=1)
        return self.brain(inputs_embeds=embedded, attention_mask=attention_mask, **kwargs)
