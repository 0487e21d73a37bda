"""Which softmax layers of a model can be replaced, by what, what it costs and what it buys.

`capture` taps the model's attention, `candidates` are what may stand in for it, `metrics` and
`interventions` say what that does to rows of attention and to the model's loss, `plan` replaces layers
together, `timing` measures the gain, `run.audit` does all of it and `report` says what came of it.
"""
