"""GEMMs: cuBLASLt by algorithm, and our Hopper kernel with fused epilogues."""
