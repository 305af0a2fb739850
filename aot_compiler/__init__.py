"""The compiler: from a YAML configuration to an artifact. Start reading at ``pipeline.py``."""
