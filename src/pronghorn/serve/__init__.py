"""A trained run behind an HTTP endpoint that speaks OpenAI's protocol, on this machine: for a look."""
