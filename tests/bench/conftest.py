import sys
from pathlib import Path

# The benchmarks are scripts beside the package, not part of it.
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "workers"))
