"""What a person can put right, told in one line."""


class BadInput(ValueError):
    """Input that cannot be audited: the message is one line that says what came and what is taken."""
