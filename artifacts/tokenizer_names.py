"""Names of the files in an artifact's ``tokenizer/`` folder, which compiler and runtime share."""

TOKENIZER_FILE = "tokenizer.json"
"""For the ``tokenizers`` library."""

TEMPLATE_FILE = "chat_template.jinja"
"""The chat template, where the checkpoint has one."""

CONFIG_FILE = "tokenizer_config.json"
"""The special tokens as strings, and ``add_bos_token``."""
