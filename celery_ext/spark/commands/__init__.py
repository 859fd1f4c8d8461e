"""The jobs of the command line. Each module of this package is found automatically."""
