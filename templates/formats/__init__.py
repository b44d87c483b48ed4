"""Weight formats, one file each; `base.py` says what one is."""
