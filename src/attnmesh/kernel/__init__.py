"""One device's attention: `blocks` (the cut), `walk` (the loop), each kernel, `choose`, `attend` (the operator)."""
