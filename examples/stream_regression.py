"""Kernel regression on a million rows in constant memory, beside the exact smoother on what that can hold.

    python examples/stream_regression.py [--rows 1000000]

Rows arrive a batch at a time and are gone afterwards: what is learned is a state of fixed size. The exact
Nadaraya–Watson smoother keeps every row and goes through all of them for every prediction, so it gets fewer rows here.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from phistate.smoother import KernelSmoother

BATCH = 50_000
EXACT_ROWS = 100_000
QUERIES = 2_000
NOISE = 0.5
BANDWIDTH = 0.2


def truth(X: np.ndarray) -> np.ndarray:
    """What is to be learned: waves on a slope."""
    return np.sin(3 * X[:, 0]) * np.cos(2 * X[:, 1]) + X[:, 0] / 2


def rows(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of the stream: two columns in [-3, 3], and the truth with noise."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3, 3, (count, 2))
    return X, truth(X) + NOISE * rng.standard_normal(count)


def report(name: str, count: int, size: int, learning: float, predicting: float, error: float) -> None:
    """One line of the table."""
    times = f"{learning:>8.2f} s {predicting / QUERIES * 1e6:>10.1f} µs"
    print(f"{name:<22} {count:>9,} {size / 1e3:>10,.0f} kB {times} {error:>9.4f}")


def main() -> None:
    """Learn, predict, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    total = parser.parse_args().rows
    queries = np.random.default_rng(1).uniform(-2.5, 2.5, (QUERIES, 2))
    wanted = truth(queries)
    print(f"{'':<22} {'rows':>9} {'memory':>13} {'learning':>10} {'a prediction':>13} {'rms error':>9}")

    stream = KernelSmoother(bandwidth=BANDWIDTH).prepare(rows(BATCH, 0)[0])
    learning = 0.0
    seen = 0
    for seed in range(-(-total // BATCH)):
        batch = rows(min(BATCH, total - seen), seed)
        start = time.perf_counter()
        stream.partial_fit(*batch)
        learning += time.perf_counter() - start
        seen += len(batch[0])
        if seed == -(-EXACT_ROWS // BATCH) - 1 or seen == total:
            start = time.perf_counter()
            error = np.sqrt(np.mean((stream.predict(queries) - wanted) ** 2))
            state = stream.state_
            assert state is not None
            report("phistate, a stream", seen, state.nbytes, learning, time.perf_counter() - start, error)

    exact = KernelSmoother(bandwidth=BANDWIDTH, exact=True)
    learning = 0.0
    for seed in range(-(-EXACT_ROWS // BATCH)):
        batch = rows(BATCH, seed)
        start = time.perf_counter()
        exact.partial_fit(*batch)
        learning += time.perf_counter() - start
    start = time.perf_counter()
    values = exact.predict(queries)
    predicting = time.perf_counter() - start
    error = np.sqrt(np.mean((values - wanted) ** 2))
    # Two columns, a target and a weight, in float64.
    report("exact, every row kept", EXACT_ROWS, EXACT_ROWS * 4 * 8, learning, predicting, error)
    print(f"exact on {total:,} rows would take {predicting * total / EXACT_ROWS / QUERIES * 1e6:,.0f} µs a prediction.")


if __name__ == "__main__":
    main()
