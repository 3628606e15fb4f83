"""Matrix products: cuBLASLt by algorithm, and our Hopper product with fused epilogues."""
