"""`python -m benchmarks`: the op benchmarks."""

from __future__ import annotations

from benchmarks.ops import main

raise SystemExit(main())
