"""A fuzzer: real commands on damaged, hostile and odd inputs, each in a process of its own.

    bases       valid files, made by the planner
    mutations   what is done to them: bytes, JSON and YAML, lines of text, ONNX
    suites      which command gets which file
    runner      a command in a forked process, with limits
    checks      what must hold, whatever the input was
    pool        cases on several processors
    bugs        mistakes put into the package, which the checks have to find

`python -m tests.fuzz --help` says how to run it; a case depends on its number and the seed alone.
"""
