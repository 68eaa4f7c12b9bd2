"""Names that this room uses of diffusers beside its stable interface, and the versions that are tested."""

from typing import Any

from attnmesh.runtime.upstream import Upstream

_DISPATCH = "diffusers.models.attention_dispatch"

DIFFUSERS = Upstream(
    "diffusers",
    "0.42",
    "0.43",
    (
        "diffusers:ModelMixin._parallel_config",
        *(
            f"{_DISPATCH}:_AttentionBackendRegistry.{name}"
            for name in ("register", "_backends", "_constraints", "_supported_arg_names", "_supports_context_parallel")
        ),
    ),
)
DIFFUSERS.check()
Attention: Any = DIFFUSERS.find("diffusers.models.attention_processor:Attention")
AttentionBackendName: Any = DIFFUSERS.find(f"{_DISPATCH}:AttentionBackendName")
AttentionModuleMixin: Any = DIFFUSERS.find("diffusers.models.attention:AttentionModuleMixin")
BackendRegistry: Any = DIFFUSERS.find(f"{_DISPATCH}:_AttentionBackendRegistry")
ContextParallelInput: Any = DIFFUSERS.find("diffusers.models._modeling_parallel:ContextParallelInput")
ContextParallelOutput: Any = DIFFUSERS.find("diffusers.models._modeling_parallel:ContextParallelOutput")
MochiAttention: Any = DIFFUSERS.find("diffusers.models.attention_processor:MochiAttention")
dispatch_attention_fn: Any = DIFFUSERS.find(f"{_DISPATCH}:dispatch_attention_fn")
unwrap_module: Any = DIFFUSERS.find("diffusers.utils.torch_utils:unwrap_module")
