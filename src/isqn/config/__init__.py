"""Settings of a run: rules on fields, parts that agents share, and their TOML files."""
