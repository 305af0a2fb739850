"""The contract between compiler and runtime: manifest, signatures, files on disk, and every error."""
