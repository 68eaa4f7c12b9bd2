"""Tiny transformers of diffusers, with the inputs of one forward pass."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Tiny:
    """A model of two or more layers with random weights, and its inputs for a number of tokens."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]  # by rows of pixels, and batch

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Module.to(self.make(), dtype).train(False)
        with torch.no_grad():  # some layers begin at zero, and would hide what comes before them
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return model

    def given(self, rows: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> Inputs:
        torch.manual_seed(1)
        inputs = self.inputs(rows, batch)
        return {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in inputs.items()}


def _right_padded(batch: int, tokens: int) -> Tensor:
    """A mask of text: each sequence has other tokens."""
    return torch.arange(tokens)[None] < torch.tensor([tokens - 2 - 2 * b for b in range(batch)])[:, None]


def _scattered(batch: int, tokens: int) -> Tensor:
    return (torch.arange(tokens)[None] + torch.arange(batch)[:, None]) % 3 > 0


def _wan(**more: Any) -> nn.Module:
    sizes = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 24, "text_dim": 16}
    return diffusers.WanTransformer3DModel(**sizes, in_channels=4, out_channels=4, freq_dim=8, **more)


def _wan_inputs(rows: int, batch: int) -> Inputs:
    video, text = torch.randn(batch, 4, 3, 2 * rows, 6), torch.randn(batch, 7, 16)
    return {"hidden_states": video, "timestep": torch.full((batch,), 500), "encoder_hidden_states": text}


def _wan_image_inputs(rows: int, batch: int) -> Inputs:
    image, text = torch.randn(batch, 5, 20), torch.randn(batch, 512, 16)
    return {**_wan_inputs(rows, batch), "encoder_hidden_states": text, "encoder_hidden_states_image": image}


def _wan_frames_inputs(rows: int, batch: int) -> Inputs:
    return {**_wan_inputs(rows, batch), "timestep": torch.randint(0, 999, (batch, 3 * rows * 3))}


def _flux() -> nn.Module:
    sizes = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4}
    more = {"joint_attention_dim": 24, "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8), "in_channels": 4}
    return diffusers.FluxTransformer2DModel(**sizes, **more, guidance_embeds=True)


def _flux_inputs(rows: int, batch: int) -> Inputs:
    ids = torch.zeros(5 * rows, 3)
    ids[:, 1], ids[:, 2] = torch.arange(5 * rows) // 5, torch.arange(5 * rows) % 5
    return {
        "hidden_states": torch.randn(batch, 5 * rows, 4),
        "encoder_hidden_states": torch.randn(batch, 6, 24),
        "pooled_projections": torch.randn(batch, 8),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": ids,
        "txt_ids": torch.zeros(6, 3),
        "guidance": torch.full((batch,), 3.0),
    }


def _qwen_image() -> nn.Module:
    sizes = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "joint_attention_dim": 24}
    return diffusers.QwenImageTransformer2DModel(**sizes, in_channels=8, out_channels=2, axes_dims_rope=(4, 4, 8))


def _qwen_image_inputs(rows: int, batch: int, mask: Callable[[int, int], Tensor] = _right_padded) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 5 * rows, 8),
        "encoder_hidden_states": torch.randn(batch, 9, 24),
        "encoder_hidden_states_mask": mask(batch, 9),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, rows, 5)]] * batch,
    }


def _ltx() -> nn.Module:
    sizes = {"num_attention_heads": 4, "attention_head_dim": 8, "cross_attention_dim": 32, "num_layers": 2}
    return diffusers.LTXVideoTransformer3DModel(**sizes, in_channels=4, out_channels=4, caption_channels=16)


def _ltx_inputs(rows: int, batch: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 2 * rows * 3, 4),
        "encoder_hidden_states": torch.randn(batch, 8, 16),
        "timestep": torch.full((batch,), 500),
        "encoder_attention_mask": _right_padded(batch, 8).long(),
        "num_frames": 2,
        "height": rows,
        "width": 3,
    }


def _ltx_frames_inputs(rows: int, batch: int) -> Inputs:
    return {**_ltx_inputs(rows, batch), "timestep": torch.randint(0, 999, (batch, 2 * rows * 3))}


def _hunyuan_video() -> nn.Module:
    sizes = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "num_single_layers": 1}
    more = {"num_refiner_layers": 1, "text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (4, 4, 4)}
    return diffusers.HunyuanVideoTransformer3DModel(
        **sizes, **more, in_channels=4, out_channels=4, mlp_ratio=2.0, patch_size=1, patch_size_t=1
    )


def _hunyuan_video_inputs(rows: int, batch: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 4, 2, rows, 5),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": torch.randn(batch, 8, 16),
        "pooled_projections": torch.randn(batch, 8),
        "encoder_attention_mask": _right_padded(batch, 8).long(),
        "guidance": torch.full((batch,), 6016.0),
    }


def _hunyuan_video_15() -> nn.Module:
    sizes = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "num_refiner_layers": 1}
    more = {"text_embed_dim": 16, "text_embed_2_dim": 12, "image_embed_dim": 10, "rope_axes_dim": (4, 4, 4)}
    return diffusers.HunyuanVideo15Transformer3DModel(
        **sizes, **more, in_channels=4, out_channels=4, mlp_ratio=2.0, patch_size=1, patch_size_t=1
    )


def _hunyuan_video_15_inputs(rows: int, batch: int) -> Inputs:
    return {
        "hidden_states": torch.randn(batch, 4, 2, rows, 5),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": torch.randn(batch, 8, 16),
        "encoder_attention_mask": _right_padded(batch, 8).long(),
        "encoder_hidden_states_2": torch.randn(batch, 5, 12),
        "encoder_attention_mask_2": _right_padded(batch, 5).long(),
        "image_embeds": torch.zeros(batch, 3, 10),
    }


def _flux2() -> nn.Module:
    sizes = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4}
    more = {"joint_attention_dim": 24, "timestep_guidance_channels": 16, "axes_dims_rope": (4, 4, 4, 4)}
    return diffusers.Flux2Transformer2DModel(**sizes, **more, in_channels=8)


def _flux2_inputs(rows: int, batch: int) -> Inputs:
    ids = torch.zeros(1, 5 * rows, 4)
    ids[..., 1], ids[..., 2] = torch.arange(5 * rows) // 5, torch.arange(5 * rows) % 5
    return {
        "hidden_states": torch.randn(batch, 5 * rows, 8),
        "encoder_hidden_states": torch.randn(batch, 6, 24),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": ids.expand(batch, -1, -1),
        "txt_ids": torch.zeros(batch, 6, 4),
        "guidance": torch.full((batch,), 3.0),
    }


def _chrono_edit() -> nn.Module:
    sizes = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 24, "text_dim": 16}
    more = {"in_channels": 4, "out_channels": 4, "freq_dim": 8}
    return diffusers.ChronoEditTransformer3DModel(**sizes, **more)


def _minimax_h3() -> nn.Module:
    sizes = {"num_attention_heads": 4, "attention_head_dim": 12, "hidden_size": 32, "num_layers": 2, "ffn_dim": 24}
    more = {"num_refiner_layers": 1, "in_channels": 4, "audio_in_channels": 6, "text_dim": 16, "freq_dim": 8}
    times = {"time_embed_hidden_dim": 16, "time_embed_dim": 8, "rope_freq_dim": 2}
    return diffusers.MiniMaxH3Transformer3DModel(**sizes, **more, **times)


def _minimax_h3_inputs(rows: int, batch: int) -> Inputs:
    counts = {"text": 4, "video": 5 * rows, "audio": 3}
    tokens = sum(counts.values())
    order = torch.randperm(tokens).split(list(counts.values()))
    places = {name: each.sort().values for name, each in zip(counts, order, strict=True)}
    tags = torch.zeros(tokens, dtype=torch.long)
    tags[places["text"]], tags[places["audio"]] = 1, 2
    return {
        "hidden_states": torch.randn(batch, counts["video"], 16),
        "audio_hidden_states": torch.randn(batch, counts["audio"], 6),
        "encoder_hidden_states": torch.randn(batch, counts["text"], 16),
        "timestep": torch.tensor([0.2, 0.7]),
        "timestep_indices": torch.randint(0, 2, (tokens,)),
        "token_tags": tags,
        "position_ids": torch.randint(0, 9, (tokens, 3)),
        **{f"{name}_indices": place for name, place in places.items()},
    }


MODELS = {
    "wan": Tiny(_wan, _wan_inputs),
    "wan of images": Tiny(lambda: _wan(image_dim=20, added_kv_proj_dim=48), _wan_image_inputs),
    "wan with a time a token": Tiny(_wan, _wan_frames_inputs),
    "flux": Tiny(_flux, _flux_inputs),
    "qwen-image": Tiny(_qwen_image, _qwen_image_inputs),
    "qwen-image, any mask": Tiny(_qwen_image, lambda rows, batch: _qwen_image_inputs(rows, batch, _scattered)),
    "ltx": Tiny(_ltx, _ltx_inputs),
    "ltx with a time a token": Tiny(_ltx, _ltx_frames_inputs),
    "hunyuan-video": Tiny(_hunyuan_video, _hunyuan_video_inputs),
    "hunyuan-video-1.5": Tiny(_hunyuan_video_15, _hunyuan_video_15_inputs),
    "flux2": Tiny(_flux2, _flux2_inputs),
    "chrono-edit": Tiny(_chrono_edit, _wan_inputs),
    "minimax-h3": Tiny(_minimax_h3, _minimax_h3_inputs),
}


PIPELINES: dict[str, tuple[str, Inputs]] = {
    "wan": ("WanPipeline", {"height": 48, "width": 80, "num_frames": 9}),
    "flux": ("FluxPipeline", {"height": 48, "width": 80, "guidance_scale": 3.0}),
    "qwen-image": ("QwenImagePipeline", {"height": 48, "width": 80, "true_cfg_scale": 3.0}),
    "ltx": ("LTXPipeline", {"height": 96, "width": 160, "num_frames": 17, "guidance_scale": 3.0}),
    "hunyuan-video": ("HunyuanVideoPipeline", {"height": 48, "width": 80, "num_frames": 9, "true_cfg_scale": 3.0}),
}
"""Pipelines by model, and the sizes of what they make."""


def pipeline_steps(name: str, model: nn.Module, steps: int = 2) -> Tensor:
    """Latents after some steps of the real pipeline of a model, from given embeddings of two prompts."""
    kind, sizes = PIPELINES[name]
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "vae", "image_encoder"))
    known = inspect.signature(getattr(diffusers, kind).__init__).parameters
    pipeline = getattr(diffusers, kind)(
        **{part: None for part in parts if part in known},
        transformer=model,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )
    pipeline.set_progress_bar_config(disable=True)
    given = MODELS[name].given(3)
    text = given["encoder_hidden_states"]
    prompts = {}
    for prompt, sign in (("prompt", 1), ("negative_prompt", -1)):
        prompts[f"{prompt}_embeds"] = sign * text
        mask = given.get("encoder_attention_mask", given.get("encoder_hidden_states_mask"))
        if mask is not None:
            mask_name = f"{prompt}_embeds_mask" if name == "qwen-image" else f"{prompt}_attention_mask"
            prompts[mask_name] = mask if sign == 1 else torch.ones_like(mask)
        if "pooled_projections" in given:
            pooled = f"{prompt.removesuffix('prompt')}pooled_prompt_embeds"
            prompts[pooled] = sign * given["pooled_projections"]
    options = {"num_inference_steps": steps, "output_type": "latent", "generator": torch.Generator().manual_seed(2)}
    return pipeline(**prompts, **sizes, **options, return_dict=False)[0]
