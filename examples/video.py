"""Low-rank training of a video transformer whose tokens are split over all ranks, then two denoising steps.

        torchrun --nproc-per-node 4 examples/video.py [--frames 9] [--steps 20]

The model is a tiny Wan with random weights. Any number of ranks prints the same loss.
"""

import argparse
import os

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from peft import LoraConfig

import attnmesh as am
import attnmesh.diffusers


def main() -> None:
    """Train an adapter, and denoise with it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
    torch.set_default_device(device)
    mesh = None
    if ranks > 1:
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
        mesh = am.init_mesh(am.mesh_shape(ranks, 4, 4))

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 48, "text_dim": 16}
    model = WanTransformer3DModel(**sizes, in_channels=4, out_channels=4, freq_dim=16)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    attnmesh.diffusers.enable(model, mesh)  # the only line for the mesh in inference

    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-2)
    clean, text = torch.randn(1, 4, 1 + options.frames // 4, 8, 10), torch.randn(1, 7, 16)
    for _ in range(options.steps):
        noise, time = torch.randn_like(clean), torch.rand(())  # alike on every rank
        noisy = (1 - time) * clean + time * noise
        velocity = model(noisy, 1000 * time.reshape(1), text).sample
        loss = (velocity - (noise - clean)).square().mean()
        loss.backward()
        for parameter in learned:
            if mesh is not None:
                dist.all_reduce(parameter.grad)  # a sum: each rank has the part of its own tokens
        optimizer.step()
        optimizer.zero_grad()

    pipeline = WanPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(), transformer=model.eval())
    pipeline.set_progress_bar_config(disable=True)
    video = pipeline(
        prompt_embeds=text,
        negative_prompt_embeds=torch.zeros_like(text),
        height=64,
        width=80,
        num_frames=options.frames,
        num_inference_steps=2,
        generator=torch.Generator(device).manual_seed(0),
        output_type="latent",
    ).frames
    attnmesh.diffusers.disable(model)
    if mesh is None or dist.get_rank() == 0:
        print(f"loss {loss.item():.5f} on {ranks} ranks; latents {tuple(video.shape)}, mean {video.mean():.5f}")
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
