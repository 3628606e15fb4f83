"""`pronghorn run`: scripts and notebooks written for another library, as they are, on Pronghorn.

The one place where names of other libraries are stood in for, in a process that the user starts for it, as follows:

- `import unsloth` finds our names: a finder at the head of `sys.meta_path` (modules.py).
- `import trl` and `import transformers` *in the script's own files* give it a view of that package, in which trainers and their
  arguments take what older versions took (fronts.py). `builtins.__import__` looks at who imports: every other file gets what
  it always gets. So trl and transformers stay as they are: no class, no module and no entry of `sys.modules` of theirs is
  changed, and what they import from each other is untouched.

    modules.py    which module answers to which name
    fronts.py     the script's view of trl and transformers
    renames.py    what trainers and their arguments were called before, and what it is now
    trainer_data.py  what the data of a trainer meant before
    chat_ids.py   what a tokenizer returned before
    adaptor.py    all of that, switched on and off
    notebooks.py  code cells out of .ipynb files; `%load_ext pronghorn`
    running.py    a file as `__main__`: arguments, tracebacks, exit codes
    child.py      the script again, in a process that multiprocessing starts
    explain.py    what would be adapted, and what a script uses that is not here
"""
