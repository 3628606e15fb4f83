"""Exports: what was trained, written for the program that is to run it, and compared there with the trained model.

    targets.py    the table: a target is a row
    job.py        what a target's functions get: the checkpoint, a folder to write into, progress, the merged model
    checking.py   held-out rows, what the trained model makes of them, and the verdict on an export
    run.py        one command: every target asked for, one after the other
    record.py     export.json and the model card

A row (`targets.Target`) has these functions of a `job.Job`:

    refuse(job)              raises CommandError where this run cannot be written so ("merge first"); before anything is written
    size(job) -> int         bytes that it will write, asked of the disk before the start
    write(job)               writes into `job.folder`, which nobody else sees. It is renamed to `job.target` when all is done,
                             so never write to `job.target`. Facts for export.json go into `job.facts`. The tokenizer's files,
                             README.md and export.json are not its business (`job.copy_tokenizer()` where they are wanted)
    check(job, reference)    loads `job.folder` with the program it is for and scores `reference.rows`: `job.judged(...)` for a
                             file that has the trained weights in 16 or 32 bits, else `reference.verdict(...)` (checking.py);
                             or `Verdict.skipped("why")`, where that program is not installed
    usage(job) -> [Usage]    how to run it: printed, and in the model card

`job.merged()` is a Hugging Face folder with the adapter merged in, made once a command: what converters start from.
A target may have variants, `--to gguf:q8_0`: `Target.variants`, the first of which is the default, and `job.variant`.
"""
