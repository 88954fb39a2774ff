"""`spaces.GPU` as ZeroGPU has it, without a GPU: a task runs in a forked process, and all that passes is pickled.

Of its errors only Gradio's come back as they are (spaces 0.51, zero/wrappers.py). What this cannot show is CUDA.
"""

import inspect
import multiprocessing
import os
from functools import wraps

import gradio as gr

FORK = multiprocessing.get_context("fork")


def GPU(task, duration=None):
    assert duration, "a time was expected"

    @wraps(task)
    def streamed(*args):
        mine, its = FORK.Pipe()
        process = FORK.Process(target=_run, args=(task, mine, its), daemon=True)
        process.start()
        its.close()
        print(f"ZeroGPU: {task.__name__} runs in a process of its own", flush=True)
        try:
            mine.send(args)
            while (result := mine.recv())[0] != "end":
                kind, value = result
                if kind == "error":
                    raise value
                yield value
                mine.send("go on")
        finally:
            mine.close()
            process.join()

    if inspect.isgeneratorfunction(task):
        return streamed
    return wraps(task)(lambda *args: list(streamed(*args))[-1])


def _run(task, other, pipe):
    other.close()  # so that its end is seen here
    try:
        result = task(*pipe.recv())
        for value in result if inspect.isgenerator(result) else [result]:
            pipe.send(("value", value))
            pipe.recv()  # EOFError: nobody wants the rest
        pipe.send(("end", None))
    except (EOFError, BrokenPipeError):
        pass
    except gr.Error as error:
        pipe.send(("error", error))
    except Exception as error:
        pipe.send(("error", gr.Error(type(error).__name__)))
    os._exit(0)
