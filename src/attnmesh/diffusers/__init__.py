"""Diffusion transformers on a mesh: full attention over the tokens of an image or a video, shared by all ranks.

        attnmesh.diffusers.enable(pipeline.transformer, mesh)
        video = pipeline(prompt, generator=torch.Generator("cuda").manual_seed(0)).frames    # alike on every rank
        attnmesh.diffusers.disable(pipeline.transformer)

Only the model given changes. Nothing of diffusers is patched.
"""

from attnmesh.diffusers.enable import disable as disable
from attnmesh.diffusers.enable import enable as enable
