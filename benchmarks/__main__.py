"""`python -m benchmarks`: the op benchmarks. Whole training steps are `python -m benchmarks.bench`; `make bench` runs both."""

from __future__ import annotations

from benchmarks.ops import main

raise SystemExit(main())
