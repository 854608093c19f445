"""Run ``benchmarks.attach.start``."""

from benchmarks.attach.start import main

if __name__ == "__main__":
    main()
