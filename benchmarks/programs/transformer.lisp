;;; Four layers of width 128 over 128 tokens at batch 16, with Adam: a transformer so small that its launches count.
;;; Read by benchmarks/small.py, which makes its batches itself.
(import "nn" "optim" "loss")

(defknob batch 16 "samples in a step")
(defknob precision bf16 "arithmetic" :one-of (f32 tf32 bf16 f64))
(defknob d-model 128)
(defknob heads 4)

(defdata corpus (tokens "tokens.bin" :dtype u16) :split ((train 1)))

(deflayer self-attention (x)
  (let* ((joint (linear x (* 3 d-model) :name "qkv"))
         (part (lambda (i)
                 (split-heads (slice joint :axis -1 :start (* i d-model) :stop (* (+ i 1) d-model)) heads))))
    (linear (join-heads (attend (part 0) (part 1) (part 2) :causal true)) d-model :name "out")))

(deflayer feed-forward (x)
  (linear (gelu-tanh (linear x (* 4 d-model) :name "up")) d-model :name "down"))

(deflayer block (x)
  (residual (residual x self-attention) feed-forward))

(deflayer transformer (tokens)
  (let* ((x (+ (embedding tokens 256 d-model :name "token") (param "position" [128 d-model] :init (normal :std 1))))
         (x (reduce (lambda (x i) (block x)) (range 4) :initial-value x)))
    (linear (layer-norm x) 256 :bias false :name "head")))

(defun entropy (tokens targets)
  (cross-entropy (transformer tokens) targets))

(defrun train
  :data (windows corpus :split train :context 128 :batch batch :shuffle true)
  :loss entropy
  :optimizer (adam :lr 1e-3)
  :precision precision
  :steps 1000
  :seed 0)
