"""Reads the JSON body of a token request without holding the event loop. A package since one file would be too long:

`reader` reads and decodes a body, `long_arrays` takes long prompts out of it while it arrives, `faults` words what is
wrong with it. Nothing here checks a rule of the API: that is `router.http.validation`.
"""
