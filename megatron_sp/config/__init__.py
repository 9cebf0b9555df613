"""Every setting: the schema (dataclasses), the rules between fields (one file per subject), presets."""
