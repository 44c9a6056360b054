"""What the help of each `saltus train` command says."""

RESUMES = """[dim]Give the same command again after an interruption: it continues from the last
    checkpoint, and the result is the same.[/dim]"""
PTP = f"""Train a drafter, or an adapter, for the method ptp.

    {RESUMES}

    The model first reads the teacher's texts once; its hidden states, or the
    intervals of uniforms, are cached on disk. A drafter is a small network beside
    the model. An adapter is a low-rank part of it that acts on draft positions
    alone. Neither can change a text.

    [bold]Examples[/bold]

        saltus train ptp --list

        saltus train ptp --recipe smollm2 --teacher teacher --out drafter

        saltus train ptp -r smollm2-adapter --teacher teacher --set rank=32 --work runs/32

        saltus train ptp -r smollm2-adapter --teacher teacher --set loss=bce --work runs/bce

        saltus train ptp -r smollm2-dflash --teacher teacher --out dflash

    Afterwards: saltus generate --method ptp --option ptp.model=drafter "Who?"

    [bold]A recipe[/bold] is a TOML file. A wrong [i]--set[/i] lists the settings that it may have.
    """
MTP = f"""Train a head for multi-token prediction, for a model whose checkpoint has none.

    {RESUMES}

    The model first reads the teacher's texts once; its last hidden states are
    cached on disk. The head is a projection and one layer like the model's. It is
    trained to go on with its own output, as it does when it drafts. It cannot
    change a text.

    [bold]Examples[/bold]

        saltus train mtp --teacher teacher --out head

        saltus train mtp --teacher teacher --set mtp-head.window=6 --work runs/six

    Afterwards: saltus generate --method mtp --option mtp.model=head "Who?"
    """
MTPC = f"""Train heads for the method mtpc: the joint distribution of the next tokens.

    {RESUMES}

    The model first reads the teacher's texts once; its hidden states are cached
    on disk, and the heads are trained on them alone. They cannot change a text.

    [bold]Examples[/bold]

        saltus train mtpc --list

        saltus train mtpc --teacher teacher --set circuit=ff --out ff

        saltus train mtpc --teacher teacher --set circuit=btree --from ff --work runs/btree --out btree

    Afterwards: saltus generate --method mtpc --option mtpc.model=ff "Who?"
    """
JACOBI = f"""Train a model, or an adapter of it, to decode blocks in parallel (Jacobi Forcing).

    {RESUMES}

    Its texts are those of [bold]saltus collect jacobi[/bold]. An adapter acts on draft
    positions alone, and the unchanged model verifies: no text changes. With
    [i]--set trains=model[/i] the whole model is trained, and texts are those of the
    trained model.

    [bold]Examples[/bold]

        saltus train jacobi --list

        saltus train jacobi --teacher trajectories --out adapter

        saltus train jacobi --teacher trajectories --set noise_schedule=any --set mask=clean --work runs/cllm

        saltus train jacobi --teacher trajectories --set trains=model --set learning_rate=1e-5 --work runs/t --out tuned

    Afterwards:

        saltus generate --method jacobi --option jacobi.model=adapter "Who?"

        saltus generate --model tuned --method jacobi "Who?"
    """
ASSD = f"""Train a model that fills holes anywhere, from scratch or from weights, on stories or on code.

    {RESUMES}

    A hundredth of the texts is held out. After the model the pairwise correction
    of the drafts of assd is trained, in [i]correction_steps[/i].

    [bold]Examples[/bold]

        saltus train assd --list

        saltus train assd --recipe stories --text stories.txt --out my-stories

        saltus train assd --recipe code --code /usr/lib/python3.12 --set max_length=320 --out my-code

        saltus train assd --text tales.csv --from my-stories --set optimizer=adamw --set learning_rate=1e-4

    Afterwards: saltus infill --model my-stories "The cat [[6]] the mouse."
    """
