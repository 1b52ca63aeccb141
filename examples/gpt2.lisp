;;; GPT-2 (Radford et al. 2019): 124 million parameters, vocabulary 50,304 (50,257 and padding), 1,024 tokens, tied head.
;;; Shows a model of some size in one file whose shapes are knobs, and training on a token file.
;;; `sexpgpu explain examples/gpt2.lisp` lists the parameters; it needs no data.
;;;
;;; The tokens are not part of the repository. `data/gpt2_tokens.bin` beside this file is little-endian u16 without a header,
;;; for example of your own text with tiktoken (pip install tiktoken):
;;;
;;;     import numpy, tiktoken
;;;     tokens = tiktoken.get_encoding("gpt2").encode_ordinary(open("text.txt", encoding="utf-8").read())
;;;     numpy.array(tokens, dtype="<u2").tofile("examples/data/gpt2_tokens.bin")
;;;
;;;     sexpgpu run examples/gpt2.lisp --set batch=8
(import "nn" "optim" "loss" "schedule")

(defknob layers 12 "transformer blocks" :min 1)
(defknob heads 12 "attention heads; they divide d-model" :min 1)
(defknob d-model 768 "width of the residual stream" :min 1)
(defknob context 1024 "tokens of one sample" :min 1)
(defknob vocabulary 50304 "rows of the token table; every token is below it" :min 1)
(defknob batch 32 "samples in a step" :min 1)
(defknob accumulate 1 "micro-batches of a step" :min 1)
(defknob steps 20000 "steps of the run")
(defknob warmup 700 "steps of the warmup")
(defknob lr 6e-4 "peak learning rate")
(defknob seed 1337 "seed of the run")
(defknob precision bf16 "arithmetic" :one-of (f32 tf32 bf16 f64))

(defvariant tiny :layers 2 :heads 2 :d-model 32 :context 32 :vocabulary 512 :batch 4 :steps 20 :warmup 5)
(defvariant medium :layers 24 :heads 16 :d-model 1024 :batch 16 :lr 3e-4)

(defdata corpus
  (tokens "data/gpt2_tokens.bin" :dtype u16)
  :split ((train 99/100) (valid 1/100)))

;; GPT-2's initial values: normal of deviation 0.02, less before a residual connection, and biases of 0.
(deflayer dense (x units &key (std 0.02))
  (+ (matmul x (param "weight" [(dim x -1) units] :init (normal :std std)))
     (param "bias" [units] :init zeros)))

(defun into-residual (x)
  (dense x d-model :std (/ 0.02 (sqrt (* 2 layers))) :name "out"))

(deflayer self-attention (x)
  (let* ((joint (dense x (* 3 d-model) :name "qkv"))
         (part (lambda (i)
                 (split-heads (slice joint :axis -1 :start (* i d-model) :stop (* (+ i 1) d-model)) heads))))
    (into-residual (join-heads (attend (part 0) (part 1) (part 2) :causal true)))))

(deflayer feed-forward (x)
  (into-residual (gelu-tanh (dense x (* 4 d-model) :name "up"))))

(deflayer block (x)
  (residual (residual x self-attention) feed-forward))

(deflayer gpt2 (tokens)
  (let* ((table (param "token" [vocabulary d-model] :init (normal :std 0.02)))
         (position (param "position" [context d-model] :init (normal :std 0.02)))
         (x (reduce (lambda (x i) (block x)) (range layers) :initial-value (+ (embed table tokens) position))))
    (matmul (layer-norm x) (transpose table))))

(defun lm-loss (tokens targets)
  (cross-entropy (gpt2 tokens) targets))

(defrun pretrain
  :data (windows corpus :split train :context context :batch batch :shuffle true)
  :loss lm-loss
  :optimizer (adamw :lr (warmup-cosine :peak lr :warmup warmup :steps steps :final (* 1/10 lr)) :betas [0.9 0.95]
                    :weight-decay 0.1)
  :clip-norm 1.0
  :accumulate accumulate
  :precision precision
  :steps steps
  :seed seed
  :checkpoint-every 1000)

(defeval valid
  :data (windows corpus :split valid :context context :batch batch :limit 20)
  :every 250
  :metrics ((loss lm-loss)))
