"""Start a visit, which imports nothing that a machine may lack, or one of the stages."""

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what other benchmarks share

if __name__ == "__main__":
    started = time.monotonic()
    if sys.argv[1:2] == ["visit"]:
        from gpu import visit

        visit.main()
    else:
        from gpu import stages

        stages.main(started)
