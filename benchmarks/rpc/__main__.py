"""Run ``benchmarks.rpc.round_trips``."""

from benchmarks.rpc.round_trips import main

if __name__ == "__main__":
    main()
