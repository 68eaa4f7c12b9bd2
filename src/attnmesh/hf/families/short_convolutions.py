"""Families with layers of a short convolution: LFM2 and LFM3."""

from attnmesh.hf.family import ATTENTION_FIELDS, EXPERT_FIELDS, RECURRENT, RECURRENT_STATES, Family, Recurrence
from attnmesh.hf.recurrent.convolution import CONVOLUTION, CONVOLUTION_SOURCE

SHORT_CONVOLUTION = Recurrence(functions=CONVOLUTION)


def _family(kind: str, layer: str, fields: str, *, convolution: dict[str, str] = CONVOLUTION_SOURCE) -> Family:
    return Family(
        kind,
        f"{ATTENTION_FIELDS} intermediate_size rope_parameters {fields}",
        sources={f"{layer}.forward": "e607e269337d", **convolution},
        uses=(RECURRENT_STATES,),
        layers=RECURRENT,
        recurrences={layer: SHORT_CONVOLUTION},
    )


FAMILIES = (
    _family("lfm2", "Lfm2ShortConv", ""),
    _family("lfm2_moe", "Lfm2MoeShortConv", EXPERT_FIELDS),
    _family("lfm3", "Lfm3ShortConv", "head_dim sliding_window", convolution={"causal_conv1d_fn": "4c59a422a424"}),
)
