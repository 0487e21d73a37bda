"""The configuration of a model whose code comes with its checkpoint."""

from transformers import PretrainedConfig


class RemoteConfig(PretrainedConfig):
    model_type = "remote-mamba"

    def __init__(self, vocab_size=41, hidden_size=32, num_hidden_layers=2, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**kwargs)
