"""Make a video with a pipeline of diffusers whose transformer's tokens are split over all ranks.

    python examples/video.py                                                     # one process, a tiny pipeline
    torchrun --nproc-per-node 2 examples/video.py                                # the same video
    torchrun --nproc-per-node 8 examples/video.py --pipeline Wan-AI/Wan2.1-T2V-14B-Diffusers --prompt "a cat" \\
        --size 1280x720 --frames 81 --steps 50 --bf16 --out cat.mp4              # and --offload, --fp8 for memory

Every rank runs the whole pipeline with one prompt and one seed. Rank 0 writes the video.
"""

import argparse
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, WanPipeline
from diffusers import WanTransformer3DModel as Transformer
from diffusers.utils import export_to_gif, export_to_video
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

import attnmesh as am
import attnmesh.diffusers

TRANSFORMERS = ("transformer", "transformer_2")
"""Components of a pipeline that go on the mesh: Wan 2.2 has two."""


def main() -> None:
    """Load the pipeline, put it on the mesh, and make the video."""
    args = parse_arguments()
    ranks, place = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", place) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    dtype = torch.bfloat16 if args.bf16 else torch.float32
    pipeline = DiffusionPipeline.from_pretrained(args.pipeline, dtype=dtype) if args.pipeline else tiny(dtype)
    for model in (getattr(pipeline, name, None) for name in TRANSFORMERS):
        if model is not None and args.fp8:
            model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)
        if model is not None and ranks > 1:
            heads = model.config.num_attention_heads
            mesh = am.init_mesh(device.type, am.mesh_shape(ranks, heads, heads))
            attnmesh.diffusers.enable(model, mesh, checked=True)  # another seed on a rank is an error
    if args.offload:
        pipeline.enable_model_cpu_offload(device=device)
    else:
        pipeline.to(device)

    rank = dist.get_rank() if ranks > 1 else 0
    pipeline.set_progress_bar_config(disable=rank > 0)
    width, height = map(int, args.size.split("x"))
    frames = pipeline(
        args.prompt, height=height, width=width, num_frames=args.frames, num_inference_steps=args.steps,
        generator=torch.Generator("cpu").manual_seed(args.seed), output_type="np",
    ).frames[0]  # fmt: skip
    if rank == 0:
        write(frames, args.out)
        print(f"{len(frames)} frames of {args.size} on {ranks} ranks, mean {frames.mean():.5f}; saved as {args.out}")
    if ranks > 1:
        dist.destroy_process_group()


def write(frames: numpy.ndarray, file: Path) -> None:
    """Write frames (frame, row, column, colour) from 0 to 1 as .gif, .mp4 or .npy."""
    if file.suffix == ".npy":
        numpy.save(file, frames)
    elif file.suffix == ".gif":
        export_to_gif(WanPipeline.numpy_to_pil(frames), str(file), fps=16)
    else:
        export_to_video(list(frames), str(file), fps=16)


def tiny(dtype: torch.dtype) -> Any:
    """Return a Wan pipeline with a few random weights, made from configurations."""
    torch.manual_seed(0)
    letters = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    text = UMT5EncoderModel(UMT5Config(vocab_size=128, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4))
    latents = {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = AutoencoderKLWan(base_dim=8, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **latents)
    sizes = {"num_attention_heads": 4, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 48, "text_dim": 16}
    transformer = Transformer(**sizes, in_channels=4, out_channels=4, freq_dim=16)
    words = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="\0")
    pipeline = WanPipeline(words, text.eval(), vae, FlowMatchEulerDiscreteScheduler(), transformer=transformer)
    return pipeline if dtype == torch.float32 else pipeline.to(dtype)


def parse_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", help="a folder or a name on the hub; without it a tiny pipeline, random weights")
    parser.add_argument("--prompt", default="a cat walks over the keys of a piano")
    parser.add_argument("--size", default="80x64", help="width x height")
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="weights and computation in bfloat16")
    parser.add_argument("--fp8", action="store_true", help="keep the transformer's weights in 8 bits")
    parser.add_argument("--offload", action="store_true", help="keep on the GPU only the component that runs")
    parser.add_argument("--out", type=Path, default=Path("video.gif"), help=".gif, .mp4 or .npy")
    args = parser.parse_args()
    if args.out.suffix not in (".gif", ".mp4", ".npy"):
        parser.error(f"--out: expected a file named .gif, .mp4 or .npy, given {args.out}")
    if args.out.suffix == ".mp4" and find_spec("imageio_ffmpeg") is None:
        parser.error("--out: .mp4 needs pip install imageio imageio-ffmpeg; or name the file .gif")
    return args


if __name__ == "__main__":
    main()
