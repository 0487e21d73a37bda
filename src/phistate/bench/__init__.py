"""Benchmarks of the ops: a registry of cases, the peers they are measured beside, and the machine's limits.

``cases`` says what is measured, ``work`` what each case computes and costs, ``peers`` beside whom, ``runner`` how,
``limits`` against what the machine can do, ``render`` how it is shown.
"""
